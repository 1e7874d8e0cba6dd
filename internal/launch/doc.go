// Package launch starts the workers of one host and supervises them. It assigns
// ranks through package cluster, writes the workers' output line by line, and
// forwards signals. If a worker fails, it stops the whole job, reports the first
// failure and its cause, and leaves no process behind.
//
// Run turns the calling process into the reaper of all its descendants, and kills the
// remaining ones at the end. Therefore only a command should call it.
package launch
