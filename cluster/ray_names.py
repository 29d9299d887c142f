"""Names of a cluster in Ray. They are apart from `cluster.serve`, whose imports take a command more than a second."""

from __future__ import annotations

APPLICATION = "paceline"  # the Serve application, and the namespace of the actors
DIRECTORY = "paceline-directory"  # the directory's actor
