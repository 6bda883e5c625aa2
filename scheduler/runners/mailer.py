"""Program that mails a job's log: ``python -I -S mailer.py SENDMAIL TO SUBJECT LOG PACKED``.

LOG: path of the log; if this word is empty, the mail has no text. PACKED: empty, or any text if the log is packed with
gzip. The exit code is the exit code of sendmail. The program imports only the standard library, so it can continue
after the scheduler has ended.
"""

import os
import subprocess
import sys


def header(text):
    """Return ``text`` as the value of a mail header. The value is one line, so it cannot add another header."""
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
        pass  # sendmail has ended and printed the reason
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
