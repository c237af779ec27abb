"""Progress of long work on standard error: a bar in a terminal; in a log file a line at every
tenth."""

import sys

from tqdm import tqdm


class Bar(tqdm):
    """tqdm's bar, with its arguments, or lines where standard error is no terminal."""

    def __init__(self, *args, **options):
        self.is_log = not sys.stderr.isatty()
        self.tenth = 0
        if self.is_log:
            options["mininterval"] = 1
            options["bar_format"] = (
                "{desc}: {percentage:3.0f} % {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}, {rate_fmt}{postfix}]"
            )
        super().__init__(*args, **options)

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
