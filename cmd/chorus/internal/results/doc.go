// Package results writes the reports of package perf as chorus perf prints them: the tables of nccl-tests, JSON, CSV,
// the format of Go's benchmarks, and a page of HTML. It compares a report with an earlier one.
package results
