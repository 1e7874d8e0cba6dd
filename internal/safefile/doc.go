// Package safefile opens files whose names come from a user, the environment or another
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
package safefile
