// Package goroutine tells goroutines apart, and has sets of OS threads.
package goroutine

// ID returns a number for the calling goroutine that no other goroutine has while it
// lives. The system's number of the thread would take a call of the system, and belongs
// to the goroutine only while that is locked to its thread.
func ID() uintptr
