"""The training loop.""" ""
