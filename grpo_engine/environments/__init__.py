"""Tasks (data and reward) and the runner that turns their items into scored groups.""" ""
