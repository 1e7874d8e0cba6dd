// Package timeline reads the files of internal/timeline. It merges them into one file for
// Perfetto, and computes how much of the communication is hidden behind kernels.
package timeline
