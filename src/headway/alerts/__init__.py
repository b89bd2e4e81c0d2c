"""Alerts: what needs somebody, told once when it begins and once when it is over.

rules       what is watched, and from which value on
readings    what the rules see: counters that others keep
judgement   which alerts open and close: hysteresis, mutes, timers
records     the rows, their events, and what people do with them
evaluator   `Evaluator`: a round every few seconds, by one process of a deployment
"""

from headway.alerts.evaluator import Evaluator
from headway.alerts.judgement import Change
from headway.alerts.records import Alert, Mute, acknowledge, mute, unmute
from headway.alerts.rules import RULES, Rule, Rules

__all__ = ["RULES", "Alert", "Change", "Evaluator", "Mute", "Rule", "Rules", "acknowledge", "mute", "unmute"]
