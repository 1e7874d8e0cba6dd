// Package safe handles what comes from other users and processes: files, texts and connections.
//
// It opens files whose names come from a user, the environment or another
// file. No such file can make Chorus block, read without a limit, write to another
// user's file, or trust data from another user.
//
//   - [Open] and [Read] are for inputs: they accept only regular files and never wait
//     for the other end of a pipe. [OpenIn] and [ReadIn] also follow no link out of a folder.
//   - [Create] is for outputs: it does not follow a link in the last element of the path
//     and truncates only files of this user. Other users cannot read files of
//     [CreatePrivate].
//   - A [Folder] is for caches and logs: a directory that only this user or root can
//     change. Files are opened relative to its descriptor, so that no process can
//     replace the directory between the check and the use.
//   - [EndsEarly] recognizes truncated files.
//
// It escapes untrusted text, such as names in files and the output of
// workers, for display on a terminal. No character in the result of [Text] moves the cursor, ends
// a line, or changes the direction of text.
//
// It guards the sockets of a process: it limits the connections of a listener, keeps
// file descriptors for other purposes, and identifies the user at the other end of a Unix socket.
// The kernel guarantees that answer, so that processes of one host authenticate without a secret.
package safe
