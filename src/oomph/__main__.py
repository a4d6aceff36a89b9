"""python -m oomph"""

from oomph.cli import main

raise SystemExit(main())
