package nvml

// A raw is NVML as one of the two bindings calls it: C names, C widths, no policy.
type raw interface {
	init() Return
	text(Return) string
	count() (int, Return)
	byIndex(i int) (rawDevice, Return)
	byUUID(uuid string) (rawDevice, Return)
}

// A rawDevice has the calls with an nvmlDevice_t.
type rawDevice interface {
	uuid() (string, Return)
	migMode() (current, pending uint32, r Return)
	utilization() (gpu, memory uint32, r Return)
	temperature() (celsius uint32, r Return)
	powerUsage() (milliwatts uint32, r Return)
	smClock() (mhz uint32, r Return)
	memoryUsed() (bytes uint64, r Return)
	computeProcesses() ([]Process, Return)
	nvLinkState(link int) (enabled bool, r Return)

	name() (string, Return)
	pciBusID() (string, Return)
	persistence() (mode uint32, r Return)
	computeMode() (mode uint32, r Return)
	eccMode() (current, pending uint32, r Return)
	totalECC(kind, counter uint32) (uint64, Return)
	memoryErrors(kind, counter, location uint32) (uint64, Return)
	remappedRows() (RemappedRows, Return)
	clockEvents() (uint64, Return)
	powerLimit() (milliwatts uint32, r Return)
	defaultPowerLimit() (milliwatts uint32, r Return)
	pcieReplays() (uint32, Return)
	nvLinkErrors(link int, counter uint32) (uint64, Return)
	field(id, scope uint32) (fieldValue, Return)
	fabric() (Fabric, Return)
}

// A Return is an nvmlReturn_t.
type Return int32

// The results that Chorus distinguishes.
const (
	success          Return = 0
	invalidArgument  Return = 2
	notSupported     Return = 3
	notFound         Return = 6
	insufficientSize Return = 7
	driverNotLoaded  Return = 9
	functionNotFound Return = 13
)

// maxNVLinks is NVML_NVLINK_MAX_LINKS of the newest header.
const maxNVLinks = 36
