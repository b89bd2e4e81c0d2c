"""The SQL of the alerts: their own tables, and the snapshot of other tables that the rules need."""
