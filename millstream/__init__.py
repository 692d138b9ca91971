"""Process life, command line, settings, the supervisor behind `millstream up`, lag and bench."""
