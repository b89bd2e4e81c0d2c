"""Alerts: problems that need a person, published once when they open and once when they close.

rules       the rules and their limits
readings    the current values of the rules
judgement   opening and closing alerts: hysteresis, mutes, timers
actions     acknowledge, mute and unmute
evaluator   `Evaluator`: evaluates the rules every few seconds, in one process of a deployment
store       the SQL: the tables of alerts, and the snapshot of counters
"""

from headway.alerts.actions import acknowledge, mute, unmute
from headway.alerts.evaluator import Evaluator
from headway.alerts.judgement import Change
from headway.alerts.rules import RULES, Rule, Rules
from headway.alerts.store.alerts import Alert, Mute

__all__ = ["RULES", "Alert", "Change", "Evaluator", "Mute", "Rule", "Rules", "acknowledge", "mute", "unmute"]
