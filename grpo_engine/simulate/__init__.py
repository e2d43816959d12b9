"""A run on paper: the real admission, staleness and buffer rules, with recorded lengths and measured speeds.

What is real is `rollouts.state` (slots, queue, batches, what is too old), how far an environment of ours samples ahead
and which server it asks. What is on paper is time: servers and trainer take as long as their speeds say. No torch.
"""
