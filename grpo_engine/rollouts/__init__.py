"""The rollout API: a durable store, batch forming, and the HTTP app.""" ""
