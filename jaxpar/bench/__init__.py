"""Measurements that remember where they were taken."""
