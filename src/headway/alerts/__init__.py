"""Alerts: problems that need a person, published once when they open and once when they close.

rules       the rules and their limits
readings    the current values, read from counters of the other packages
judgement   opening and closing alerts: hysteresis, mutes, timers
records     the tables, their events, and the changes by users
evaluator   `Evaluator`: evaluates the rules every few seconds, in one process of a deployment
"""

from headway.alerts.evaluator import Evaluator
from headway.alerts.judgement import Change
from headway.alerts.records import Alert, Mute, acknowledge, mute, unmute
from headway.alerts.rules import RULES, Rule, Rules

__all__ = ["RULES", "Alert", "Change", "Evaluator", "Mute", "Rule", "Rules", "acknowledge", "mute", "unmute"]
