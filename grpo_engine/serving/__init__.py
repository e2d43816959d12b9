"""What the HTTP services share: access control, and limits of connections and bodies."""
