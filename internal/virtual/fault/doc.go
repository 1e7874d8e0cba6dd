// Package fault injects faults into calls of the virtual devices' libraries, by a plan of
// C names and call numbers.
package fault
