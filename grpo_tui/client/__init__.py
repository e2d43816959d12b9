"""The client side of the supervisor's socket."""
