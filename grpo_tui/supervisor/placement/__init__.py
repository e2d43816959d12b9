"""Where the processes of services run: this machine, or the machines of a cluster."""
