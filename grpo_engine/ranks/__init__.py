"""The processes of one trainer: how they are started, find each other, and work on one step together."""
