package memory

// A Stat follows one quantity over time, in bytes or in pieces.
type Stat struct {
	Current   int64 // now
	Peak      int64 // the most there was since the peaks were reset
	Allocated int64 // all that was ever added, since the totals were reset
	Freed     int64 // all that was ever taken away, since the totals were reset
}
