"""What is wrong with this machine, before a run waits for it: checks that return findings, none of which can hang."""
