// Package launch starts the workers of one host and stays with them to the end:
// it gives them ranks through package cluster, writes their output line by
// line, passes signals on, stops the whole job when one of them fails, says
// which was first and why, and leaves no process behind.
//
// Run takes the whole process for itself: it makes it the reaper of all its
// descendants and kills those that are left at the end. Only a command calls
// it.
package launch
