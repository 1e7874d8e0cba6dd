// Package race finds uses of memory that streams do not order: it has clocks of streams and
// the history of the uses of a block.
package race
