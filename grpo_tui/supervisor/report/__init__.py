"""What the supervisor publishes: events, the timeline, crash reports, metrics read from program output."""
