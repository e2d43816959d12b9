"""The daemon that brings services up, keeps them up and takes them down, and the keepers below it."""
