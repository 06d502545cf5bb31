"""Key-value stores that a store cannot use, in the place of TensorStore's."""

import time


class Failing:
    """A key-value store whose every operation fails, at once or when it is waited for."""

    def __init__(self, message, at_once=False):
        self.message, self.at_once = message, at_once

    def __getattr__(self, verb):
        def fail(*_):
            if self.at_once:
                raise ValueError(self.message)
            return Failed(self.message)

        return fail


class Failed:
    def __init__(self, message):
        self.error = ValueError(message)

    def done(self):
        return True

    def exception(self):
        return self.error

    def result(self, timeout=None):
        raise self.error


class Stuck:
    """A key-value store that never answers."""

    def __getattr__(self, verb):
        return lambda *_: StuckFuture()


class StuckFuture:
    def done(self):
        return False

    def result(self, timeout=None):
        time.sleep(timeout)
        raise TimeoutError

    def cancel(self):
        return True
