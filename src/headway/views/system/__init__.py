"""Access, alerts, health, the audit trail, the relay and performance."""
