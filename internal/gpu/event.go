package gpu

import "github.com/gochorus/chorus/internal/cudadrv"

// An EventRef has an event of the driver. The public type embeds it.
type EventRef struct{ h cudadrv.Event }

// NewEventRef returns the reference of an event for the public type.
func NewEventRef(h cudadrv.Event) EventRef { return EventRef{h} }

func (r EventRef) event() cudadrv.Event { return r.h }

// HasEvent is implemented by the public type that embeds an EventRef.
type HasEvent interface{ event() cudadrv.Event }

// EventOf returns the event behind a public one.
func EventOf(x HasEvent) cudadrv.Event { return x.event() }
