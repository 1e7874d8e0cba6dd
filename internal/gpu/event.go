package gpu

import "github.com/gochorus/chorus/internal/cudadrv"

// An EventRef has an event of the driver. The public type embeds it.
type EventRef struct {
	h     cudadrv.Event
	flags uint32
}

// NewEventRef returns the reference of an event for the public type.
func NewEventRef(h cudadrv.Event, flags uint32) EventRef { return EventRef{h, flags} }

func (r EventRef) event() EventRef { return r }

// HasEvent is implemented by the public type that embeds an EventRef.
type HasEvent interface{ event() EventRef }

// EventOf returns the event behind a public one.
func EventOf(x HasEvent) cudadrv.Event { return x.event().h }

// EventFlagsOf returns the flags that the event behind a public one was made with.
func EventFlagsOf(x HasEvent) uint32 { return x.event().flags }
