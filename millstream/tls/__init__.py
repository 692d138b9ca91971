"""`millstream tls`: certificates for development and tests, by an authority of one's own.

settings   what `tls init` makes, and where
commands   makes or renews the certificates, and prints how to use them
"""
