"""Tasks (data and reward) and the runner that turns their items into scored groups.

`runner` draws an item from `items.source`, and `sampling.sample` samples it: one request to the `policy` for all
completions of a question, or one per turn and seat of a game (`prompts` builds the tokens). Each sequence is a
`groups.Conversation`; with their rewards these become a `ScoredGroup`, which `clients` posts.
"""
