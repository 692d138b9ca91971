"""`millstream broker …`: keys, accounts and users of the NATS servers, and their stored streams.

settings, commands                `init` and `user`
rotation_settings, rotation_commands    `rotate`
revocation_commands               `revoke`
store_connections                 connections to a cell's accounts, by its keys
backup_settings, backup_commands  `backup`, `restore` and `move`
backup_manifest                   what a backup consists of: the folder's files and their checksums
stream_snapshots                  one stream to a file and back, by JetStream's API
stream_restore                    a whole backup into a broker; can be repeated after a kill
store_move                        a stopped server's streams to the folders of their accounts
stream_owners                     which account owns which stream                           (pure)
"""
