package doctor

// Checks lists all checks in the order of the output. docs/DOCTOR.md has a table of them.
var Checks = []*Check{
	deviceNodes, driverMismatch, libraryCopies,
	fabricManager, mig, computeMode, otherProcesses, persistence,
	recoveryAction, rowRemap, ecc, xid, nvlink, clocks, powerLimit, pcie,
	shm, memlock, openFiles, processes, stack, cgroupMemory, cgroupCPU, hugePages,
	numa, iommu, clockSync, variables,
	ifname, hostname, rdmaPort, gdr, gds,
	gpuCount, gpuProducts, driverVersions, ncclVersions, powerCaps, mtus, subnets, seedNames, protocols, otherVariables, clockSkew, ports,
	pinned, disk, hostCopies, peerData, pairs, allReduce,
}
