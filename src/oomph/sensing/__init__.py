"""Hardware -> Machine, Device. The only room that reads hardware."""
