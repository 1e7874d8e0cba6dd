package fabric

// A Kind is a collective.
type Kind int

// The collectives, as operations of Rank.Enqueue.
const (
	AllReduces Kind = iota
	AllGathers
	ReduceScatters
	Broadcasts
	AllToAlls
	kinds
)

// String returns the name of the collective, such as "all-reduce".
func (k Kind) String() string {
	return [kinds]string{"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"}[k]
}
