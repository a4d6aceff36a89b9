"""Plan, script -> the edits that make the script follow the plan."""
