"""HTTP routes of the rollout API, request and response bodies, and access control."""
