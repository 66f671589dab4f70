"""Rewards: pure rules and grading, run in killable worker processes behind one interface."""
