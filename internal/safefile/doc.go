// Package safefile opens files whose names come from a user, the environment or
// another file, so that no file can make Chorus wait, read without a limit,
// write to another user's file, or trust data that another user has written.
//
//   - [Open] and [Read] are for inputs: they take regular files only, and never
//     wait for the other end of a pipe.
//   - [Create] is for outputs: it follows no link in the last part of the path
//     and empties only a file of this user.
//   - A [Folder] is for caches and logs: a directory that only this user or root
//     can change. Its files are opened beneath its descriptor, so that no process
//     can exchange the directory between the check and the use.
package safefile
