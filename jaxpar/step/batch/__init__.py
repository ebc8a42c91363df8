"""The batch of a step: from numbers of any kind to arrays on the devices of a layout."""
