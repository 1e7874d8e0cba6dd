// Package flight records and monitors the operations of a rank, independent of their
// backend. It has the flight recorder with its clock and its dumps, and the watchdog with its
// marks on streams and its deadlines. It also compares the ranks of one process.
package flight
