"""Progress of long work on standard error: a bar in a terminal; in a log file a line at every
tenth."""

import sys

from tqdm import tqdm


class Bar(tqdm):
    """tqdm's bar, with its arguments, or lines where standard error is no terminal."""

    def __init__(self, *args, **options):
        self.is_log, self.tenth = not sys.stderr.isatty(), 0
        layout = "{desc}: {percentage:3.0f} % {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        super().__init__(
            *args, **options, **({"mininterval": 1, "bar_format": layout} if self.is_log else {})
        )

    def display(self, msg=None, pos=None):
        if not self.is_log:
            super().display(msg, pos)
        elif self.total and (tenth := 10 * self.n // self.total) > self.tenth:
            self.tenth = tenth
            print(self, file=self.fp, flush=True)

    def close(self):
        if self.is_log and not self.disable:
            self.display()
            self.disable = True  # else an empty line would follow
        super().close()
