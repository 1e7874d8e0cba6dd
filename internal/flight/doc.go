// Package flight records and monitors the operations of a rank, independent of their
// backend: the flight recorder with its clock and its dumps, the watchdog with its marks
// on streams and its deadlines, and the comparison of the ranks of one process.
package flight
