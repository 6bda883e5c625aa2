"""Sends what a job wrote: run as ``python -I -S mailer.py SENDMAIL TO SUBJECT LOG PACKED``; exits with sendmail's code.

Stands alone, as the supervisor does: it runs on while the scheduler ends.
"""

import os
import subprocess
import sys


def header(text):
    """One line of a mail's head: nothing in it may begin another."""
    line = " ".join(text.split())
    return line if line.isascii() else "=?utf-8?B?" + encoded(line) + "?="


def encoded(text):
    import base64

    return base64.b64encode(text.encode(errors="replace")).decode()


def main(sendmail, to, subject, log, packed):
    process = subprocess.Popen([sendmail, "-oi", "--", to], stdin=subprocess.PIPE)
    head = (
        f"To: {header(to)}\nSubject: {header(subject)}\nMIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: 8bit\n\n"
    )
    try:
        process.stdin.write(head.encode())
        if log:
            with opened(log, packed) as stream:
                while piece := stream.read(1 << 16):
                    process.stdin.write(piece)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it says itself why it does not take it
    except OSError as error:
        process.stdin.write(f"\n({log}: {error.strerror})\n".encode())
        process.stdin.close()
    return process.wait()


def opened(log, packed):
    fd = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if packed:
        import gzip

        return gzip.open(os.fdopen(fd, "rb"))
    return os.fdopen(fd, "rb")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
