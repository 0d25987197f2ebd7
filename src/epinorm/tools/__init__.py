"""Commands and what they are made of: verify, bench, tune, report, export, judge."""
