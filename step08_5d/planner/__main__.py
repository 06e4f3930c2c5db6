"""python step08_5d/planner FLAGS; plan.py's head has examples."""
import signal

import plan

signal.signal(signal.SIGPIPE, signal.SIG_DFL)             # python step08_5d/planner | head
plan.main()
