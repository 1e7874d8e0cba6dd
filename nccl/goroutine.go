package nccl

// goroutine returns a number for the calling goroutine that no other one has while it
// lives. The system's number of the thread would take a call of the system for each
// operation of a group.
func goroutine() uintptr
