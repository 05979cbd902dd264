"""`python -m service` is `seqserve`."""

from service.cli import main

raise SystemExit(main())
