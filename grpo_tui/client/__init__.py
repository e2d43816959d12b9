"""The other end of the daemon's socket."""
